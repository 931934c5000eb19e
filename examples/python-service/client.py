"""Asks the service with the official client of the OpenAI API.

pip install openai
python examples/python-service/client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import sys

from openai import AsyncOpenAI


async def main(address: str) -> None:
    """A streamed chat, and many completions at once."""
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
    [model] = (await client.models.list()).data
    stream = await client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "Name three fruits."}],
        max_tokens=32,
        stream=True,
    )
    async for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    # They share every step of the model: this takes little longer than one of them.
    answers = await asyncio.gather(
        *(
            client.completions.create(
                model=model.id,
                prompt=f"Number {n}:",
                max_tokens=16,
                temperature=0.8,
                seed=n,
                extra_body={"top_k": 40},
            )
            for n in range(8)
        )
    )
    for answer in answers:
        print(repr(answer.choices[0].text), answer.usage.completion_tokens)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
