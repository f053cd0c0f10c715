"""The participants of `bench_compare.py`: one small program for each, in a process of its own.

Each is run as a file by the interpreter that has its library, and imports nothing but that and the standard library
(`jaxserve_peer.py` aside). `protocol.py`, beside them, says what they read and write.
"""
