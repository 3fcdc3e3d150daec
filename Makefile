# make toy: the whole pipeline on the embedded world. make test: all tests. Nothing is downloaded but packages.
PYTHON ?= python3

toy: .venv/ready
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash runs/toy.sh

test: .venv/ready
	.venv/bin/python -m pytest

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: toy test
