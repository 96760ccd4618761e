"""Typed functions for the FFI targets of `ffi/`, and the library that holds them."""
