"""Bundles with heads beside the LM head: the library opens them and generates with `lm`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec

from headport.bundle import MANIFEST, Bundle
from headport.lowering.command import Options, lower
from headport.manifest import encode_manifest
from headport.runtime import Generator
from tests.cpp.conftest import SANITIZER_OPTIONS, failed

PROMPT = [5, 9, 2]


def test_the_lm_head_generates_and_one_behind_another_graph_is_refused(
    headed_bundle: Path, build: Path, onnxruntime: Path, tmp_path: Path
) -> None:
    bundle = lower(Options(bundle=headed_bundle, output=tmp_path / "b", target="ort-cpu"))
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps([{"prompts": [PROMPT], "options": {"max_new_tokens": 8}}]))
    subprocess.run(
        [build / "tests" / "run_requests", bundle.path, requests, tmp_path / "replies"],
        env=SANITIZER_OPTIONS | {"HEADPORT_ORT": str(onnxruntime)},
        check=True,
    )
    [found] = json.loads((tmp_path / "replies").read_text())["requests"]
    with Generator(bundle, threads=1) as generator:
        [expected] = generator.generate([PROMPT], max_new_tokens=8)
    assert found["replies"][0]["token_ids"] == expected.token_ids
    odd = shutil.copytree(bundle.path, tmp_path / "odd")
    heads = {"lm": bundle.manifest.heads["later"]}
    manifest = msgspec.structs.replace(Bundle.open(odd).manifest, heads=heads)
    (odd / MANIFEST).write_bytes(encode_manifest(manifest))
    refused = failed(build, onnxruntime, odd, tmp_path)
    assert "before head 'lm' comes the graph head.later.blocks" in refused
