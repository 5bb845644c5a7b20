"""Every decision of a run, in plain asyncio: no Ray, no tensors."""
