"""The museum: public exactness faults of engines, planted in the embedded engine, under the certificate."""
