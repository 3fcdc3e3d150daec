# make toy: the whole pipeline on the embedded world. make test: all tests. Nothing is downloaded but packages.
PYTHON ?= python3
unexport PYTHONPATH PYTHONHOME PYTHONSAFEPATH PIP_USER # a cluster's modules set these: packages of another Python
PIP = .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-user
CPU_TORCH = https://download.pytorch.org/whl/cpu

toy: .venv/ready
	PATH="$(CURDIR)/.venv/bin:$$PATH" bash runs/toy.sh

test: .venv/ready # two halves side by side; what the second one printed comes last
	@.venv/bin/python -m pytest --part 2/2 >.venv/second.log 2>&1 & \
	trap "kill $$!" INT TERM; \
	.venv/bin/python -m pytest --part 1/2; first=$$?; wait $$!; second=$$?; \
	cat .venv/second.log; exit $$((first | second))

# On Linux without an NVIDIA GPU, torch's CPU build spares the CUDA packages. Where its index cannot be
# reached, the plain install follows. `make CPU_TORCH= toy` omits it.
.venv/ready: requirements.txt tests/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("found Python %d.%d, expected 3.10 to 3.14; give another, as in" \
		" make PYTHON=python3.12 toy" % sys.version_info[:2] if not (3, 10) <= sys.version_info < (3, 15) else 0)'
	$(PYTHON) -m venv .venv
	@if [ -n "$(CPU_TORCH)" ] && [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		echo "no nvidia-smi here: torch comes without CUDA. For a GPU elsewhere: make CPU_TORCH= .venv/ready"; \
		$(PIP) --retries 0 --timeout 15 --index-url $(CPU_TORCH) \
			$$(grep '^torch==' requirements.txt) 2>/dev/null \
		|| echo "$(CPU_TORCH) does not answer: torch comes from the usual index"; \
	fi
	$(PIP) -r requirements.txt -r tests/requirements.txt
	touch $@

.PHONY: toy test
