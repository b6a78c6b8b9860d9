"""The examples run as a user runs them; the attention function of transformers. Models: test_transformers_*.py."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from captures import capture
from paths import ROOT

from cutlass_kernels.integrations.transformers import attention

EXAMPLES = ROOT / "examples"
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


def run(name: str, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- quickstart ---


@pytest.mark.parametrize("device", DEVICES)
def test_quickstart(device):
    text = run("quickstart.py", "--layers", "2", "--device", device)
    assert text.count(": ok, ") == 7 and f"on {device}" in text
    assert text.count("torch.Size([100, 64, 128])") == 4


def test_quickstart_runs_single_pages_and_refuses_unknown_ones():
    text = run("quickstart.py", "--layers", "1", "--device", "cpu", "ragged")
    assert "ragged: ok" in text and "paged: ok" not in text
    assert "there is no page" in run("quickstart.py", "nonsense", code=2)


# --- latent attention ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", ["64", "1024"])
def test_mla_prefill(device, chunk):
    sizes = ("--heads", "4", "--chunk", chunk, "--prefixes", "300", "0", "130", "--new", "20", "40", "1")
    assert "equal up to rounding" in run("mla_prefill.py", "--device", device, *sizes)


def test_mla_prefill_refuses_other_numbers_of_requests():
    assert "a number for each request" in run("mla_prefill.py", "--prefixes", "3", "--new", "1", "2", code=2)


# --- transformers ---

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@needs_transformers
@pytest.mark.parametrize(
    "options",
    [
        ("--device", "cpu"),
        ("--device", "cpu", "--batch", "3", "--dtype", "bfloat16"),
        ("--device", "cpu", "--batch", "2", "--dtype", "float16", "--new-tokens", "1"),
    ],
    ids=["float32", "batch", "prefill"],
)
def test_llama_example(options):
    text = run("huggingface_llama.py", *options, "--no-times", "--layers", "2", "--hidden", "128", "--prompt", "20")
    assert "too large" not in text and "Greedy tokens equal" in text and "this library, pages" in text


@needs_transformers
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("hidden", [1024, 2048], ids=["head_dim_64", "head_dim_128"])
@pytest.mark.parametrize("batch", [1, 3])
def test_llama_example_on_a_gpu(dtype, hidden, batch):
    sizes = ("--layers", "4", "--hidden", str(hidden), "--heads", "16", "--kv-heads", "4", "--prompt", "300")
    text = run("huggingface_llama.py", "--device", "cuda", "--dtype", dtype, "--batch", str(batch), *sizes)
    assert "Backend of this library: reference" not in text.replace("\n", " ")
    assert "Times of the whole model" in text


@needs_transformers
def test_llama_example_refuses_sizes_that_do_not_divide():
    assert "must divide" in run("huggingface_llama.py", "--device", "cpu", "--heads", "7", code=2)


# --- the attention function of transformers ---


@pytest.mark.runs_nothing("PyTorch computes what has gradients")
@pytest.mark.parametrize("which", range(4))
def test_gradients_are_pytorch_s(which):
    """Of whatever requires one: the sinks alone, too."""
    q, k, v, sinks = tensors = [torch.randn(size) for size in ((1, 4, 3, 16), (1, 2, 5, 16), (1, 2, 5, 16), (4,))]
    tensors[which].requires_grad_()
    attention(torch.nn.Module(), q, k, v, s_aux=sinks)[0].square().sum().backward()
    assert tensors[which].grad.abs().max() > 0


@pytest.mark.gpu
def test_the_first_prefill_of_a_batch_is_captured():
    """Nothing is planned before, and what the graph keeps is not used outside of it."""
    q, k, v = (torch.randn(2, 4, 20, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
    graph, (out, _) = capture(lambda: attention(torch.nn.Module(), q, k, v), warm_up=0)
    expected, _ = attention(torch.nn.Module(), q, k, v)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, rows, keys", [(2, 16, 8192), (3, 2, 20000), (2, 600, 700)])
def test_few_rows_over_many_keys_of_a_batch(batch, rows, keys):
    """Their keys are split, and the partial results need room."""

    def tensor(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, 128, dtype=torch.bfloat16, device="cuda:0")

    q, k, v = tensor(32, rows), tensor(8, keys), tensor(8, keys)
    out, _ = attention(torch.nn.Module(), q, k, v, is_causal=True)
    mask = torch.ones(rows, keys, dtype=torch.bool, device="cuda:0").tril(keys - rows)
    k, v = (x.repeat_interleave(4, 1).float() for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, attn_mask=mask)
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), rtol=1.6e-2, atol=2e-3)
