"""Publishing and receiving weights: manifests and checksums, transports, rounding and LoRA merging."""
