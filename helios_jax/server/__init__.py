"""OpenAI-compatible HTTP in front of an `AsyncLLM`: `create_app` and `run_server`."""
