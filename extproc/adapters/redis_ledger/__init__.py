"""The shared ledger: one set of books for many workers, kept by Lua scripts in Redis or Valkey."""
