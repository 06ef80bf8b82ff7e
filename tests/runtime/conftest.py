from tests.policies.conftest import fresh_compiler, one_thread

__all__ = ["fresh_compiler", "one_thread"]
