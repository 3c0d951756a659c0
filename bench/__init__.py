"""kvstore-bench: fio-style measurement of the store and its parts."""
