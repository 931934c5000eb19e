"""`python -m headport`."""

import sys

from headport.cli import main

sys.exit(main())
