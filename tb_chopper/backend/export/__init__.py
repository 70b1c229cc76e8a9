"""A run in the formats of other tools: one file per format.

    chrome     the source trace with counters, attribution and spans added (`.json`, `.json.gz`)
    perfetto   native Perfetto tracks of all ranks (`.pftrace`)
    tables     every table of schema.py (Parquet or CSV)
    report     one self-contained page, or Markdown

`tracks` makes the counters and spans that the first two share, `output` writes whole files or none, `redact` takes
host names and paths out.
"""
