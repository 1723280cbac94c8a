"""Every completion that was trained on, in one SQLite file: schema, writer and reader."""
