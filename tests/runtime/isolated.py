"""Run by `test_isolation.py` in an interpreter of its own: all that a service does with a bundle.

`python isolated.py BUNDLE [--block]`; with `--block` the packages that a service need not install
cannot be imported.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.request
from importlib.abc import MetaPathFinder
from pathlib import Path

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript")


class Refuse(MetaPathFinder):
    """Lets no heavy package be found."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} was imported by a runtime that must not need it")


def served(bundle: Path) -> list[int]:
    """The reply to one request to the service, which runs in this process."""
    import uvicorn

    from headport.runtime import Generator
    from headport.runtime.serve.app import build_app

    generator = Generator(bundle, threads=1)
    server = uvicorn.Server(uvicorn.Config(build_app(generator, "tiny"), log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 8, "temperature": 1.0, "seed": 3}
        data = json.dumps(body | {"return_token_ids": True}).encode()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        with urllib.request.urlopen(address, data) as answer:
            token_ids: list[int] = json.load(answer)["choices"][0]["token_ids"]
        server.should_exit = True
        thread.join()
    return token_ids


def main(bundle: Path) -> None:
    from headport.cli import main as headport
    from headport.runtime import Generator

    generator = Generator(bundle, threads=1)
    ids = generator.chat_ids([{"role": "user", "content": "a"}])
    replies = generator.generate(["a b", ids], max_new_tokens=8, temperature=1.0, seed=3)
    streamed = list(generator.stream("a b", max_new_tokens=8, temperature=1.0, seed=3))
    generator.score("a b c")
    generator.logits(ids)
    code = headport(["generate", str(bundle), "-p", "a", "--max-new-tokens", "2", "--quiet"])
    print(
        json.dumps(
            {
                "token_ids": [reply.token_ids for reply in replies],
                "streamed": [token.token_id for token in streamed],
                "served": served(bundle),
                "code": code,
                "heavy": sorted(set(HEAVY) & set(sys.modules)),
                "headport": sys.modules["headport"].__file__,
            }
        )
    )


if __name__ == "__main__":
    if "--block" in sys.argv:
        sys.meta_path.insert(0, Refuse())
    main(Path(sys.argv[1]))
