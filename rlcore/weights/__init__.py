"""Publishing and receiving weights: manifests and checksums, transports and rounding."""
