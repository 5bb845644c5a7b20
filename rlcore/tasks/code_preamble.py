"""Names that programs find without importing them: source that is run before a program."""

# Names of the modules that solutions use most, for any task.
COMMON = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
import sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from builtins import pow
sys.setrecursionlimit(20000)
"""
# What LeetCode's own environment imports before a Python solution, in that order; a later name
# hides an earlier one. numpy is there too, for programs that mention it.
LEETCODE = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics
import itertools, functools, operator, io, sys, json, decimal, fractions, queue, threading, time
from typing import *
try:
    import sortedcontainers
    from sortedcontainers import *
except ImportError:  # not installed here
    pass
sys.setrecursionlimit(20000)
"""
# The site's node classes, and helpers of the tests. They cross between a program and its tests as
# the values that they hold (`sandbox.values`).
LEETCODE_NODES = """\
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next

class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right

def list_node(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def is_same_list(a, b):
    while a and b and a.val == b.val:
        a, b = a.next, b.next
    return a is None and b is None

def tree_node(values):
    nodes = [None if value is None else TreeNode(value) for value in values]
    children = iter(nodes[1:])
    for node in nodes:
        if node is not None:
            node.left, node.right = next(children, None), next(children, None)
    return nodes[0] if nodes else None

def is_same_tree(a, b):
    if a is None or b is None:
        return a is b
    return a.val == b.val and is_same_tree(a.left, b.left) and is_same_tree(a.right, b.right)
"""
