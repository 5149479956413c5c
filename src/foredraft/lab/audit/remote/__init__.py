"""Audits of somebody else's engine, with nothing but the OpenAI API."""
