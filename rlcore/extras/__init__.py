"""Parts that the main path never imports: formal proofs, masked-diffusion models, and readers of
other trainers' configurations. They are found by the names of registries."""
