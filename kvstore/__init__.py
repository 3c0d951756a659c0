"""kvstore: an asyncio-native, tiered store for the KV-cache pages of LLM serving."""
