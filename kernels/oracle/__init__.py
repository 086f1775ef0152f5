"""The oracle of every kernel: the stage tables of all ranks, executed in plain Python.

Each rank has a heap (send staging, receive staging, window, scratch), flags, and what its caller
gave. An item runs only when its waits hold; it moves rows, then writes flags, at other ranks too.

All-to-all (`run_tables`):

    pack     input -> send staging of the proxy         writes pack at the proxy
    push     input -> window of a local rank            writes push there (not for own rows)
    put      send staging -> receive staging of peer    writes arrive at the peer
    receive  receive staging -> windows or own output   writes credit, and land at the window's rank
    land     window -> output                           after land
    take     window -> output                           after push

Worked example: 2 servers x 2 ranks, tile (0 -> 1) [[6, 2], [2, 2]]: the sources send 8 and 4 rows,
the destinations get 8 and 4, and each of the two rails carries 6.

    rank 0   keeps its 6 rows for rank 2 on rail 0; its 2 rows for rank 3 it packs into the send
             staging of rank 1, rows 4..6: on their destination's rail, no copy follows the put
    rank 1   packs its own 2 rows for rank 3 and 2 rows for rank 2 as rows 0..4 of rail 1
    put      6 rows from rank 0 to rank 2, 6 rows from rank 1 to rank 3
    rank 2   receives 6 rows straight into its output, rows 0..6
    rank 3   receives its own 4 rows into its output and the other 2 into rows 6..8 of the window of
             rank 2, which lands them

Dispatch (`run_dispatch`): a token's row goes once to each server, with a header that says where
each choice belongs. Input is the list that route made, output the slots of the choices. As above,
but

    receive  also writes, for each rank of the server, Arrival records into its scratch; then land,
             to all of them: the table does not know whom a row is for
    land     the rows that the Arrival records tell of

Combine (`run_combine`): the same plan transposed, with sums on the way.

    pack     sums of own expert outputs -> partial rows of the proxy    writes pack there
    push     sums of own expert outputs -> partial rows of an owner     writes push there
    sum      partial rows of the server's ranks -> own send staging     after pack; writes sum here
    put      as above                                                   after sum
    receive  receive staging -> windows of the owners                   writes credit and land
    land     nothing                                                    after land
    take     nothing                                                    after push
    reduce   window, partial rows, own expert outputs -> output         after all land and take

Worked example: 2 servers x 2 ranks, two experts each, K = 2; rank 0 has one token, with experts 4
and 6, that is on ranks 2 and 3.

    rank 0   packs the row into the send staging of rank 1, for the tile's only row takes that rail;
             header: (slot 0, window row 0, local rank 0), (slot 0, window row 0, local rank 1)
    rank 1   puts it to rank 3
    rank 3   lands the row in its slot 0 (choice 1), copies it to row 0 of rank 2's window and tells
             rank 2: window row 0, 1 row, its sum to partial row 0; notes for itself: touched [0, 0]
    rank 2   lands the row in its slot 0 (choice 0)
    combine  expert outputs 256 on rank 2 and 1.5 on rank 3, bfloat16: rank 2 packs 256 into partial
             row 0 of rank 3, which sums 256 + 1.5 = 257.5, rounds it to bfloat16 for the way: 258,
             and puts it back to rank 1, which hands it to row 0 of rank 0's window. Rank 0 reduces
             it: 258.
"""

from .all_to_all import run_tables
from .combine import run_combine
from .dispatch import run_dispatch
from .records import CombineRank, Dispatched, DispatchRank, RowForm
from .region import OracleError
from .route import NONE, Route, route_all
from .values import DTYPES, narrow, sum_dtype, widen

__all__ = [
    "DTYPES",
    "NONE",
    "CombineRank",
    "DispatchRank",
    "Dispatched",
    "OracleError",
    "Route",
    "RowForm",
    "narrow",
    "route_all",
    "run_combine",
    "run_dispatch",
    "run_tables",
    "sum_dtype",
    "widen",
]
