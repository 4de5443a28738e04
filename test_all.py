"""All tests of ringblock: pytest test_all.py. Tests on real graphs are skipped without ../shared/data."""

from importlib import import_module

import pytest

pytest.register_assert_rewrite("tests")
pytest_plugins = ["tests.parallel"]

PARTS = """conftest test_accuracy test_bench test_ddp test_house test_link test_train test_sampler test_disk
test_edges test_types test_checkpoint test_cuda_graphs test_features test_model test_layers test_loader
test_lookahead test_metrics test_sources test_tables test_build test_store test_public test_report
test_plan test_peers test_parts test_regression"""
for _part in PARTS.split():  # longest first: no worker is left alone with one at the end
    _names = vars(import_module(f"tests.{_part}"))
    globals().update({name: _names[name] for name in _names if not name.startswith("__")})
