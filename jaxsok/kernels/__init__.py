"""The door to `ffi/`: one typed function for each FFI target, and the library that holds them."""
