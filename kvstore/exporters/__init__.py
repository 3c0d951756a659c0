"""Ways out for the numbers of `KVStore.stats()`: a Prometheus collector, a JSON file."""
