"""The error registry keeps its promises."""

from http import HTTPStatus

from contrail_common import errors
from contrail_common.errors import BY_NAME, REGISTRY, ApiError, ErrorSpec
from tests.support.each import each

SPECS = [value for value in vars(errors).values() if isinstance(value, ErrorSpec)]
OWN_CODES_FROM = 20_000


@each("spec", SPECS, ids=lambda spec: spec.name)
def test_every_spec_is_found_by_its_name_and_has_a_status_of_http(spec: ErrorSpec) -> None:
    assert BY_NAME[spec.name] is spec
    assert HTTPStatus(spec.status) >= HTTPStatus.BAD_REQUEST
    assert spec.name == spec.name.lower().replace("-", "_").strip("_")
    assert spec.title
    assert not spec.title.endswith(".")


def test_every_entry_has_a_name_in_the_module_and_each_code_one_owner() -> None:
    assert sorted(BY_NAME) == sorted(spec.name for spec in SPECS)
    assert all(REGISTRY[spec.code].code == spec.code for spec in SPECS)
    assert set(map(id, REGISTRY.values())) <= set(map(id, SPECS))


def test_variant_shares_the_code_of_a_jetstream_error() -> None:
    variants = [spec for spec in SPECS if REGISTRY[spec.code] is not spec]
    assert variants
    assert all(spec.code < OWN_CODES_FROM for spec in variants)


@each("spec", [spec for spec in SPECS if spec.status in (408, 429, 503, 504)], ids=lambda s: s.name)
def test_refusal_that_passes_by_itself_is_retryable(spec: ErrorSpec) -> None:
    assert spec.retryable or spec is errors.DATA_LOST


def test_error_reads_as_its_name_and_its_detail() -> None:
    assert str(ApiError(errors.OVERLOADED)) == "overloaded: server is overloaded"
    assert str(ApiError(errors.OVERLOADED, "too much")) == "overloaded: too much"
