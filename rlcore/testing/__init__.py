"""Tools for a contributor's tests: builders of records and fakes. Part of the product; nothing
outside tests and benchmarks imports it."""
