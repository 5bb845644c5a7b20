"""A server by the package mcp, run by the Python of an environment that has it."""

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Always fail."""
    raise ValueError("it is broken")


server.run()
