"""What the author of a lake format or a storage tests it with: fakes, and suites that real ones and fakes both pass."""
