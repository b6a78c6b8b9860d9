"""The examples run as a user runs them, and small models compute alike on the transformers integration."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from paths import ROOT

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

try:
    import transformers
except ImportError:
    transformers = None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")


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


def small_llama(name: str = "Llama", **options):
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    sizes = dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    return model_class(config_class(**{**sizes, **options})).eval()


@pytest.fixture
def implementation() -> str:
    from cutlass_kernels.integrations.transformers import register

    return register()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (2, 11))


@torch.no_grad()
def logits(model, implementation: str, ids: torch.Tensor, **options) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
def test_logits_equal_sdpa(implementation, ids, batch):
    model, ids = small_llama(), ids[:batch]
    expected = logits(model, "sdpa", ids)
    torch.testing.assert_close(logits(model, implementation, ids), expected, rtol=1e-4, atol=1e-4)
    ones = torch.ones_like(ids)
    torch.testing.assert_close(logits(model, implementation, ids, attention_mask=ones), expected, rtol=1e-4, atol=1e-4)


@needs_transformers
def test_a_wrong_attention_shows_in_the_logits(implementation, ids, monkeypatch):
    """The comparison above would not mean much if attention hardly mattered to the logits of random weights."""
    from cutlass_kernels.integrations import transformers as integration

    model = small_llama()
    expected = logits(model, "sdpa", ids[:1])
    attend = integration.plan_free.attention
    monkeypatch.setattr(
        integration.plan_free,
        "attention",
        lambda *args, **options: attend(*args, **{**options, "window": (8, -1)}),
    )
    assert float((logits(model, implementation, ids[:1]) - expected).abs().max()) > 0.01


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
def test_generate_gives_the_tokens_of_sdpa(implementation, ids, batch):
    model, ids = small_llama(), ids[:batch]
    tokens = {}
    for name in ("sdpa", implementation):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(tokens["sdpa"], tokens[implementation])


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
def test_chunked_prefill_on_a_cache(implementation, ids, batch):
    """Several rows behind cached keys: the causal mask is aligned to the last key."""
    model, ids = small_llama(), ids[:batch]
    expected = logits(model, "sdpa", ids)
    cache = transformers.DynamicCache(config=model.config)
    parts = [logits(model, implementation, part, past_key_values=cache, use_cache=True) for part in ids.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cache_in_pages(ids, batch, page_size):
    """A prompt, several tokens at once and single ones."""
    from cutlass_kernels.integrations.paged_cache import PagedCache

    model, ids = small_llama(), torch.cat([ids, ids], 1)[:batch]
    expected = logits(model, "sdpa", ids)
    cache = PagedCache(model.config, batch, ids.size(1), model.device, model.dtype, page_size)
    parts = [
        logits(model, cache.register(), part, past_key_values=cache, use_cache=True)
        for part in ids.split([12, 1, 1, 4, 1, 3], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == ids.size(1)
    with pytest.raises(RuntimeError, match="larger max_tokens"):
        logits(model, cache.register(), ids[:, :1], past_key_values=cache, use_cache=True)


@needs_transformers
@pytest.mark.parametrize("name", ["Mistral", "Gemma2"])
def test_windows_and_soft_caps_over_pages(ids, name):
    from cutlass_kernels.integrations.paged_cache import PagedCache

    more = {"head_dim": 16, "attn_logit_softcapping": 0.7} if name == "Gemma2" else {}
    model = small_llama(name, sliding_window=4, **more)
    cache = PagedCache(model.config, len(ids), 16, model.device, model.dtype, page_size=4)
    parts = [
        logits(model, cache.register(), part, past_key_values=cache, use_cache=True) for part in ids.split([6, 1, 4], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model, "eager", ids), rtol=1e-4, atol=1e-4)


@needs_transformers
def test_a_cache_in_pages_refuses_padding(ids):
    from cutlass_kernels.integrations.paged_cache import PagedCache

    model, padded = small_llama(), torch.ones_like(ids)
    padded[0, :3] = 0
    cache = PagedCache(model.config, len(ids), 16, model.device, model.dtype)
    with pytest.raises(NotImplementedError, match="padding"):
        logits(model, cache.register(), ids, attention_mask=padded, past_key_values=cache, use_cache=True)


@needs_transformers
@pytest.mark.parametrize("batch", [1, 2])
def test_sliding_window(implementation, ids, batch):
    model = small_llama("Mistral", sliding_window=4)
    ids = ids[:batch]
    expected = logits(model, "eager", ids)
    torch.testing.assert_close(logits(model, implementation, ids), expected, rtol=1e-4, atol=1e-4)
    cache = transformers.DynamicCache(config=model.config)
    parts = [
        logits(model, implementation, part, past_key_values=cache, use_cache=True)
        for part in ids.split([6, 1, 1, 3], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-4)


@needs_transformers
def test_soft_cap_and_own_scale(implementation, ids):
    options = dict(head_dim=16, sliding_window=5, attn_logit_softcapping=0.7, query_pre_attn_scalar=5)
    model = small_llama("Gemma2", **options)
    expected = logits(model, "eager", ids)
    torch.testing.assert_close(logits(model, implementation, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_function_with_sinks(batch, rows, causal):
    """Per-head sinks, also where the sequences of a batch become heads, against the formula."""
    from cutlass_kernels.integrations.transformers import attention

    q, sinks = torch.randn(batch, 6, rows, 16), torch.randn(6)
    k, v = torch.randn(2, batch, 2, 9, 16)
    out, weights = attention(torch.nn.Module(), q, k, v, scaling=0.3, is_causal=causal, s_aux=sinks)
    scores = 0.3 * q @ k.repeat_interleave(3, 1).transpose(2, 3)
    if causal:
        scores.masked_fill_(~torch.ones(rows, 9).tril(9 - rows).bool(), -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(batch, -1, rows, 1)], -1).softmax(-1)
    expected = (with_sink[..., :-1] @ v.repeat_interleave(3, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert weights is None


@pytest.mark.runs_nothing("PyTorch computes what has gradients")
@pytest.mark.parametrize("which", range(4))
def test_gradients_are_pytorch_s(which):
    """Of whatever requires one: the sinks alone, too."""
    from cutlass_kernels.integrations.transformers import attention

    q, k, v, sinks = tensors = [torch.randn(size) for size in ((1, 4, 3, 16), (1, 2, 5, 16), (1, 2, 5, 16), (4,))]
    tensors[which].requires_grad_()
    attention(torch.nn.Module(), q, k, v, s_aux=sinks)[0].square().sum().backward()
    assert tensors[which].grad.abs().max() > 0


@pytest.mark.gpu
def test_the_first_prefill_of_a_batch_is_captured():
    """Nothing is planned before, and what the graph keeps is not used outside of it."""
    from cutlass_kernels.integrations.transformers import attention

    q, k, v = (torch.randn(2, 4, 20, 64, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = attention(torch.nn.Module(), q, k, v)
    expected, _ = attention(torch.nn.Module(), q, k, v)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, rows, keys", [(2, 16, 8192), (3, 2, 20000), (2, 600, 700)])
def test_few_rows_over_many_keys_of_a_batch(batch, rows, keys):
    """Their keys are split, and the partial results need room."""
    from cutlass_kernels.integrations.transformers import attention

    def tensor(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, 128, dtype=torch.bfloat16, device="cuda:0")

    q, k, v = tensor(32, rows), tensor(8, keys), tensor(8, keys)
    out, _ = attention(torch.nn.Module(), q, k, v, is_causal=True)
    mask = torch.ones(rows, keys, dtype=torch.bool, device="cuda:0").tril(keys - rows)
    k, v = (x.repeat_interleave(4, 1).float() for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, attn_mask=mask)
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), rtol=1.6e-2, atol=2e-3)


@needs_transformers
def test_kept_lengths_serve_inference_mode_and_no_grad(implementation, ids):
    model = small_llama()
    with torch.inference_mode():
        first = logits(model, implementation, ids)
    assert torch.equal(first, logits(model, implementation, ids))
