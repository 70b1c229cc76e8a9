"""What --redact takes out and what it leaves."""

from __future__ import annotations

import json

import pytest

from tb_chopper.backend.export.redact import Redactor

REDACTOR = Redactor(["node0", "gpu-7.cluster.org", "gpu-7"])


@pytest.mark.parametrize(("before", "after"), [
    ("/home/alice/train/model.py(12): forward", "model.py(12): forward"),
    ("/home/alice", "/home"),
    ("C:\\Users\\bob\\run\\x.py", "x.py"),
    ("file:///srv/data/x.bin", "file:x.bin"),
    ("at /opt/venv/lib/torch/nn.py(3) and /a/b.py", "at nn.py(3) and b.py"),
    ("aten::add / aten::mul", "aten::add / aten::mul"),
    ("a/b", "a/b"),
    ("</script>", "</script>"),
    ("layers.0/attn", "layers.0/attn"),
    ("node0_r0_4711", "host2_r0_4711"),
    ("node0 and gpu-7.cluster.org and gpu-7", "host2 and host1 and host0"),
    ("node01, mynode0, gpu-70", "node01, mynode0, gpu-70"),
])
def test_text(before: str, after: str) -> None:
    assert REDACTOR.text(before) == after


def test_a_host_called_like_a_word_of_the_format_does_not_break_it() -> None:
    event = {"ph": "X", "cat": "gpu_memcpy", "name": "kernel_gpu", "args": {"gpu_name": "gpu"}}
    assert json.loads(Redactor(["gpu"]).json(json.dumps(event).encode())) == {**event, "args": {"gpu_name": "host0"}}


@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_stays_json(ascii_only: bool) -> None:
    value = {"host_name": "box", "name": '核核/心 "quoted" \\ \n\t/', "x": "/home/alice/a b/c.py",
             "y": "C:\\Users\\bob\\z.py", "hosts": ["node0"]}
    out = json.loads(REDACTOR.metadata(json.dumps(value, ensure_ascii=ascii_only).encode()))
    assert out["name"] == value["name"] and out["host_name"] == "redacted"
    assert "alice" not in out["x"] and out["y"] == "z.py" and out["hosts"] == ["host2"]


def test_tree_keeps_keys_and_numbers() -> None:
    tree = {"/a/b/": [1, "/x/y/z", {"k": ("node0", None)}]}
    assert REDACTOR.tree(tree) == {"/a/b/": [1, "z", {"k": ["host2", None]}]}
