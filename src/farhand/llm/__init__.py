"""Models: one method that streams a reply, the OpenAI-compatible client, and replay."""
