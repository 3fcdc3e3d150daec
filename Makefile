# make toy: the whole pipeline on the embedded world. make test: all tests. Nothing is downloaded but packages.
PYTHON ?= python3

toy: .venv/ready
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash runs/toy.sh

test: .venv/ready # two halves side by side; what the second one printed comes last
	@.venv/bin/python -m pytest --part 2/2 >.venv/second.log 2>&1 & \
	.venv/bin/python -m pytest --part 1/2; first=$$?; wait $$!; second=$$?; \
	cat .venv/second.log; exit $$((first | second))

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: toy test
