"""Proofs in Metamath: databases, files of statements, the checker, and small theorems."""
