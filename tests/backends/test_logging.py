"""The log of backend choices: on where its own logger is, and nowhere else."""

from __future__ import annotations

import logging

import pytest
import torch

import cutlass_kernels as ck


@pytest.fixture
def own_logger():
    logger = logging.getLogger("cutlass_kernels")
    before = logger.level
    yield logger
    logger.setLevel(before)


def call() -> None:
    q = torch.randn(2, 4, 64).half()
    ck.attention(q, q, q)


def test_a_line_per_choice(own_logger, caplog):
    own_logger.setLevel(logging.INFO)
    call()
    assert "backend reference (asked for auto)" in caplog.text


def test_a_line_names_what_a_call_asks_for(own_logger, caplog):
    own_logger.setLevel(logging.INFO)
    q, mask = torch.randn(2, 4, 64).half(), torch.ones(2, 2, dtype=torch.bool)
    ck.single_prefill_with_kv_cache(q, q, q, causal=True, custom_mask=mask, sinks=torch.zeros(4))
    assert "custom_mask" in caplog.text and "sinks" in caplog.text and "causal" not in caplog.text


def test_the_root_logger_switches_nothing_on(own_logger, caplog):
    """SGLang sets it to INFO: a line per layer and step, and no direct call."""
    own_logger.setLevel(logging.NOTSET)
    with caplog.at_level(logging.INFO):
        assert not ck._compute.selection.is_logged()
        call()
    assert caplog.text == ""


def test_disabled_logging_switches_it_off(own_logger):
    own_logger.setLevel(logging.INFO)
    logging.disable(logging.INFO)
    try:
        assert not ck._compute.selection.is_logged()
    finally:
        logging.disable(logging.NOTSET)
