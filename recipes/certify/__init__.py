"""Certificates of other projects' engines, and the museum of public exactness faults."""
