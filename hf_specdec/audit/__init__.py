"""The identity audit: are outputs unchanged? Token by token at equal seeds, and by law with fresh randomness."""

from __future__ import annotations

from hf_specdec.audit.extras import AuditDependencyError, require_extras

require_extras()

from hf_specdec.audit.documents import Document, read_all_documents, read_documents  # noqa: E402
from hf_specdec.audit.report import write_report  # noqa: E402
from hf_specdec.audit.results import AuditResults  # noqa: E402
from hf_specdec.audit.run import Names, run_audit  # noqa: E402
from hf_specdec.audit.settings import AuditSettings  # noqa: E402

__all__ = [
    "AuditDependencyError",
    "AuditResults",
    "AuditSettings",
    "Document",
    "Names",
    "read_all_documents",
    "read_documents",
    "run_audit",
    "write_report",
]
