import sys

from collectives.cli import main

sys.exit(main())
