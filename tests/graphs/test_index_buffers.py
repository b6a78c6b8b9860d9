"""The index buffers of a wrapper for CUDA graphs: what may take their place, and how vectors get into them."""

from __future__ import annotations

import pytest
import torch
from captures import graph_wrapper

from cutlass_kernels._planned import index_buffers
from cutlass_kernels._planned.batches import Index


def test_buffers_of_a_graph_are_replaced_by_what_has_room():
    wrapper, (_, kv_indptr, _, _) = graph_wrapper()
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), None):
        with pytest.raises(ValueError, match=r"replaced|1-D torch\.int32"):
            wrapper._paged_kv_indptr_buf = wrong
        assert wrapper._paged_kv_indptr_buf is kv_indptr
    larger = torch.zeros(4, dtype=torch.int32)
    wrapper._paged_kv_indptr_buf = larger
    assert wrapper._paged_kv_indptr_buf is larger


def test_vectors_in_the_buffers_of_a_graph_are_copied_apart():
    """One kernel writes all buffers, in no order: it must not read what it writes."""
    wrapper, (qo_indptr, kv_indptr, indices, last) = graph_wrapper()
    own = torch.arange(3, dtype=torch.int32)
    vectors = {
        "qo_indptr_buf": own,
        "paged_kv_indptr_buf": qo_indptr,  # another's buffer
        "paged_kv_indices_buf": indices[2:6],
        "paged_kv_last_page_len_buf": last,  # lies where it is wanted
    }
    (from_host, copies), apart = index_buffers.copies(
        wrapper._stored, {name: Index(x, None) for name, x in vectors.items()}
    )
    assert not from_host
    assert [to for to, _, _ in copies] == [x.data_ptr() for x in (qo_indptr, kv_indptr, indices)]
    assert [count for *_, count in copies] == [3, 3, 4]
    assert [given for _, given, _ in copies] == [own.data_ptr(), *(x.data_ptr() for x in apart)]
