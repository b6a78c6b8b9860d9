"""The release wheel's tool: which interpreters it takes, and what it refuses. .ci/run builds the wheel itself."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import build_wheel
import pytest

OURS = f"cp{sys.version_info[0]}{sys.version_info[1]}"


def test_interpreters_with_headers_are_taken(tmp_path: Path) -> None:
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    assert build_wheel.tag_of(sys.executable) == (OURS if has_headers else None)
    assert build_wheel.tag_of("false") is None
    other = tmp_path / "python"  # says that it is another version
    other.write_text("#!/bin/sh\necho cp314\n")
    other.chmod(0o755)
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho cp39\n")
    old.chmod(0o755)
    found = build_wheel.interpreters([str(other), str(old), sys.executable])
    expected = {"cp314": str(other)} | ({OURS: sys.executable} if has_headers and OURS != "cp314" else {})
    assert found == expected and (not has_headers or next(iter(found)) == OURS)


@pytest.mark.parametrize(
    "shown,size,wrong",
    [
        ('consistent with the following platform tag: "manylinux_2_28_x86_64".', 1, ""),
        ('consistent with the following\nplatform tag: "manylinux_2_17_x86_64".', 1, ""),
        ('consistent with the following platform tag: "manylinux_2_34_x86_64".', 1, "is not manylinux_2_28_x86_64"),
        ('consistent with the following platform tag: "linux_x86_64".', 1, "is not manylinux_2_28_x86_64"),
        ('consistent with the following platform tag: "manylinux_2_28_x86_64".', (25 << 20) + 1, "more than"),
    ],
)
def test_a_wheel_that_is_not_what_its_tag_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, size: int, wrong: str
) -> None:
    wheel = tmp_path / "cutlass_kernels-1-py3-none-any.whl"
    with wheel.open("wb") as file:
        file.truncate(size)
    monkeypatch.setattr(build_wheel, "output_of", lambda *command: shown)
    if not wrong:
        return build_wheel.audit(wheel)
    with pytest.raises(SystemExit, match=wrong):
        build_wheel.audit(wheel)
    return None
