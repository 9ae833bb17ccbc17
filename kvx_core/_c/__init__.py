"""What is C: the ABI of libkvx as ctypes, bound calls, DLPack, files of the system."""
