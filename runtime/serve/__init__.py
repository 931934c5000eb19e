"""A bundle over HTTP, with the requests and answers of the OpenAI API.

Needs the extra `serve`. `docs/serving.md` lists every field.
"""
