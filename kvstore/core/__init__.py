"""The pure, synchronous core: tables, decisions and plans; no clock, no I/O, no asyncio."""
