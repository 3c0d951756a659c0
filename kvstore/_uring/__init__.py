"""The asyncio disk engine over io_uring, its fallbacks, and the native helpers."""
