"""What runs in processes that have the stand-in; started by the tests of the folder above, not collected by itself."""
