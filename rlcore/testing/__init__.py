"""What a contributor tests with: builders of records, fakes of the loop's clients, a simulated
clock. Part of the product; nothing outside tests and benchmarks imports it."""
