"""What ``repr()`` says of a wrapper: what is planned, and which options are in effect. Reads nothing from a device."""

from __future__ import annotations

from typing import Any

from .._core.problems import name_of


def describe(wrapper: Any) -> str:
    """The ``repr()`` of a batch wrapper, also of one whose constructor has failed."""
    facts: list[str] = []
    if hasattr(wrapper, "_plan_info"):
        facts = ["not planned"] if wrapper._plan_info is None else _plan(wrapper, wrapper._plan_info)
        facts.append(f"kv_layout={wrapper._kv_layout!r}")
        facts.append(f"backend={_backend(wrapper)}")
        facts.append(f"device={str(wrapper.device)!r}")
        facts += ["use_cuda_graph=True"] * wrapper._use_cuda_graph
    return f"{type(wrapper).__name__}({', '.join(facts)})"


def describe_latent(wrapper: Any) -> str:
    """The ``repr()`` of a wrapper of latent attention."""
    facts: list[str] = []
    if hasattr(wrapper, "_contract"):
        contract = wrapper._contract
        facts = ["not planned"]
        if contract is not None:
            rows = wrapper._total_rows
            facts = [_count(wrapper._kv_len_arr_buf.numel(), "request")]
            facts += ["rows known to the device" if rows is None else _count(rows, "row")]
            facts += [f"num_heads={wrapper._heads}", "head_dim_ckv={}, head_dim_kpe={}".format(*wrapper._dims)]
            facts += [f"page_size={wrapper._page_size}", f"q_data_type={name_of(contract.q_dtype)}"]
            facts += [f"kv_data_type={name_of(contract.kv_dtype)}", f"causal={wrapper._causal}"]
            facts += [f"sm_scale={wrapper._sm_scale!r}"]
        facts += [f"backend={wrapper._backend!r}", f"device={str(wrapper.device)!r}"]
        facts += ["use_cuda_graph=True"] * wrapper._use_cuda_graph
    return f"{type(wrapper).__name__}({', '.join(facts)})"


def describe_several(wrapper: Any, parts: dict[str, Any]) -> str:
    """The ``repr()`` of a wrapper that consists of others, a line for each."""
    lines = [f"\n  {name}: {part!r}" for name, part in parts.items()]
    return f"{type(wrapper).__name__}({','.join(lines)})"


def _plan(wrapper: Any, plan: Any) -> list[str]:
    shape, batch, options = plan.shape, plan.batch, wrapper._options
    rows = "rows known to the device" if plan.total_q is None else _count(plan.total_q, "row")
    facts = [_count(batch.size, "request"), rows]
    facts += [f"num_qo_heads={shape.num_qo_heads}", f"num_kv_heads={shape.num_kv_heads}"]
    if shape.head_dim_qk == shape.head_dim_vo:
        facts.append(f"head_dim={shape.head_dim_qk}")
    else:
        facts += [f"head_dim_qk={shape.head_dim_qk}", f"head_dim_vo={shape.head_dim_vo}"]
    if batch.page_size is not None:
        facts.append(f"page_size={batch.page_size}")
    for name, dtype in (("q", shape.q_dtype), ("kv", shape.kv_dtype), ("o", shape.o_dtype)):
        facts.append(f"{name}_data_type={name_of(dtype)}")
    if plan.multi_item is not None:
        facts.append("multi-item scoring")
    elif plan.bits is not None and not plan.mask_is_causal:
        facts.append("custom mask")
    else:
        facts.append(f"causal={options.causal}")
    defaults = {"pos_encoding_mode": "NONE", "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": None}
    given = {name: getattr(options, name) for name in defaults}
    return facts + [f"{name}={value!r}" for name, value in given.items() if value != defaults[name]]


def _backend(wrapper: Any) -> str:
    """The backend of the plan, and what was asked for where that is another."""
    asked, plan = wrapper._requested_backend, wrapper._plan_info
    if plan is None or plan.backend == asked:
        return repr(asked)
    return f"{plan.backend!r} (of {asked!r})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
