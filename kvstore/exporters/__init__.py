"""Exporters over ``stats()``; nothing here touches the hot path."""
