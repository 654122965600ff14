"""``python -m kvpersist.cli``"""

from .main import main

main()
