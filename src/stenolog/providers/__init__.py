"""Clients for language models: OpenAI-compatible servers, local models and scripted models."""
