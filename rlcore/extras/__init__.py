"""What the main path never imports: formal proofs, and readers of other trainers' configurations;
found by the names of registries."""
