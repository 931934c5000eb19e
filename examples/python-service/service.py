"""A service of one's own around a bundle: the OpenAI API, and a route beside it.

    pip install 'headport[cpu,serve]'
    python examples/python-service/service.py model.bundle --port 8000

`headport serve` does the same without the route. Torch and transformers are not needed.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

from headport.runtime import AsyncGenerator, Generator
from headport.runtime.serve.app import build_app
from headport.runtime.serve.limits import ServiceLimits


class Candidates(BaseModel):
    """A beginning, and texts that may follow it."""

    prompt: str = Field(min_length=1, max_length=4000)
    continuations: list[str] = Field(min_length=1, max_length=32)


class Ranking(BaseModel):
    """The same texts, the most likely one first."""

    continuations: list[str]
    nats_per_token: list[float]


def make_app(bundle: Path) -> FastAPI:
    """The application: everything under /v1, and /rank."""
    generator = Generator(bundle, slots=8, reply_limit=512, max_waiting=64)
    limits = ServiceLimits(body_bytes=256_000, new_tokens=512, replies=8, seconds=60.0)
    app = build_app(generator, name=bundle.resolve().name, limits=limits)
    model = AsyncGenerator(generator)

    @app.post("/rank")
    async def rank(candidates: Candidates) -> Ranking:
        start = generator.encode(candidates.prompt)
        texts = [start + generator.encode(text) for text in candidates.continuations]
        # The prompt counts for nothing; all are worked on between the steps of other requests.
        scores = await asyncio.gather(
            *(model.score([ids], prompt_tokens=len(start)) for ids in texts)
        )
        order = sorted(range(len(texts)), key=lambda n: scores[n][0].mean)
        return Ranking(
            continuations=[candidates.continuations[n] for n in order],
            nats_per_token=[scores[n][0].mean for n in order],
        )

    return app


def main() -> None:
    """Serve on this machine only; put a proxy with TLS and keys in front for others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    found = parser.parse_args()
    # Ends by Ctrl-C or SIGTERM: no new requests, 30 seconds for those that run.
    app = make_app(found.bundle)
    uvicorn.run(app, host="127.0.0.1", port=found.port, timeout_graceful_shutdown=30)


if __name__ == "__main__":
    main()
