// A follower without the SDK: keys and values of a bucket, in one file with the positions that they stand for.
//
//     npm install --prefix client/examples/node
//     node client/examples/node/follow.mjs --target 127.0.0.1:7711 --state state.json
//
// The file is written once a second. After a crash the last changes come again, and change nothing.

import fs from 'node:fs';
import {fileURLToPath} from 'node:url';
import {parseArgs} from 'node:util';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PARTITIONS = 1024;
const MESSAGE_BYTES = 24 * 2 ** 20;  // The largest value is 20 MiB. Without this option gRPC takes 4 MiB.
const SAVE_MS = 1000;
const PAUSE_MS = 500;

const {values: options} = parseArgs({options: {
  target: {type: 'string', default: '127.0.0.1:7711'},
  bucket: {type: 'string', default: 'default'},
  state: {type: 'string', default: 'state.json'},
  credit: {type: 'string', default: '0'},
  heartbeat: {type: 'string', default: '0'},
  'until-now': {type: 'boolean', default: false},
}});

const say = (words) => console.error(words);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Ids are 64 bits and stay strings. Seqnos have 48 and fit into a number.
const definition = loader.loadSync('upr/v1/change_stream_service.proto', {
  includeDirs: [fileURLToPath(new URL('../../../protos', import.meta.url))],
  longs: String, defaults: true, oneofs: true,
});
const {ChangeStreamService} = grpc.loadPackageDefinition(definition).upr.v1;

/** Rows and positions. They are saved as one: a position without its rows, or the other way round, is wrong for ever. */
class State {
  constructor(file) {
    this.file = file;
    this.clear(undefined);
    if (!fs.existsSync(file)) return;
    const {bucketVersion, partitions} = JSON.parse(fs.readFileSync(file));
    this.bucketVersion = bucketVersion;
    this.partitions = partitions.map(({rows, ...position}) => ({...position, rows: new Map(rows)}));
  }

  clear(bucketVersion) {
    this.bucketVersion = bucketVersion;
    this.partitions = Array.from({length: PARTITIONS}, () => ({seqno: 0, horizon: 0, rows: new Map()}));
    this.changed = true;
  }

  save() {
    if (!this.changed) return;
    this.changed = false;
    const partitions = this.partitions.map((one) => ({...one, rows: [...one.rows]}));
    const file = fs.openSync(`${this.file}.new`, 'w');
    fs.writeSync(file, JSON.stringify({bucketVersion: this.bucketVersion, partitions}));
    fs.fsyncSync(file);
    fs.closeSync(file);
    fs.renameSync(`${this.file}.new`, this.file);
  }

  /** What Start is to be told of a partition. Without an id it is a client that has nothing. */
  resume(partition) {
    const {failoverId, dataId, seqno, horizon} = this.partitions[partition];
    const untilNow = options['until-now'] || undefined;
    return {partition, failoverId, seqno, ...(seqno && {dataId, horizon}), untilNow};
  }

  /** The history was found to be another one above a seqno. */
  rollBack(partition, rollbackSeqno, failoverId) {
    const one = this.partitions[partition];
    // At or below that seqno all is true in both histories. The horizon counts as well: what was superseded up to
    // there was never sent. A client that can undo its rows goes back to a snapshot marker, this one to nothing.
    if (Math.max(one.seqno, one.horizon) > rollbackSeqno) {
      Object.assign(one, {seqno: 0, horizon: 0});
      one.rows.clear();
      say(`partition ${partition}: rolled back to 0`);
    }
    // What stays is true under the new id, and the old one may leave the server's log.
    one.failoverId = failoverId;
    one.dataId = one.seqno ? failoverId : undefined;
    this.changed = true;
  }

  apply(run) {
    const one = this.partitions[run.partition];
    for (const {key, value, deleted} of run.rows) {
      // Keys and values are bytes; JSON has text.
      if (deleted) one.rows.delete(key.toString('base64'));
      else one.rows.set(key.toString('base64'), value.toString('base64'));
    }
    one.seqno = Number(run.endSeqno);
    one.horizon = Math.max(one.horizon, Number(run.horizon));
    one.dataId = one.failoverId;
    this.changed = true;
  }
}

/** Step 1: whether the histories that the state stands for may be continued. */
async function hello(client, state) {
  const partitions = state.partitions.map(({failoverId}, partition) => ({partition, failoverId}));
  const answer = await new Promise((resolve, reject) => client.Hello(
    {bucket: options.bucket, partitions}, (error, response) => error ? reject(error) : resolve(response)));
  if (answer.bucketVersion !== state.bucketVersion) {
    if (state.bucketVersion) say('the bucket was made anew');
    state.clear(answer.bucketVersion);
    return;
  }
  for (const {partition, rollbackSeqno, failoverId, problem} of answer.answers) {
    // A problem is no rollback: nothing is undone, and Start will tell of it again.
    if (!problem && rollbackSeqno !== undefined) state.rollBack(partition, Number(rollbackSeqno), failoverId);
  }
}

/** Steps 2 and 3: one Follow call, from its Open to its status. Returns whether everything was received. */
function follow(client, state) {
  const call = client.Follow();
  const tokens = new Map();  // Of the open streams, by partition.
  const unfinished = new Set(state.partitions.keys());
  let interval = 60;
  let silence;

  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => call.cancel(), 3000 * interval);
  };
  // A call that has ended takes nothing more; the next one begins with Hello.
  const send = (message) => call.writable && call.write(message);
  const start = (partitions) => {
    if (partitions.length) send({start: {partitions: partitions.map((one) => state.resume(one))}});
  };
  const startLater = (partition) => setTimeout(() => start([partition]), PAUSE_MS).unref();

  const take = {
    opened({heartbeatSeconds}) {
      interval = heartbeatSeconds;
      start([...unfinished]);
    },
    startAnswers({answers}) {
      const again = [];
      for (const {partition, answer, started, rollback, refused} of answers) {
        if (answer === 'started') {
          tokens.set(partition, started.token);
          state.partitions[partition].failoverId = started.failoverId;
          state.changed = true;
        } else if (answer === 'rollback') {
          // The server was restarted since Hello.
          state.rollBack(partition, Number(rollback.rollbackSeqno), rollback.failoverId);
          again.push(partition);
        } else {
          say(`partition ${partition}: ${refused.reason}: ${refused.message}`);
          startLater(partition);
        }
      }
      start(again);
    },
    frame({plainRuns, creditBytes}) {
      // A run under another token was sent before its stream ended.
      for (const run of plainRuns) if (tokens.get(run.partition) === run.token) state.apply(run);
      // The server says what a frame costs. It is given back when the rows are dealt with.
      if (creditBytes) send({credit: {bytes: creditBytes}});
    },
    heartbeat() {
      send({pong: {}});
    },
    ended({streams, problem}) {
      if (!streams.length) {
        // The call as a whole. The server waits for the half-close.
        say(`ended: ${problem.reason}: ${problem.message}`);
        call.end();
      }
      for (const {partition, token} of streams) {
        if (tokens.get(partition) !== token) continue;
        tokens.delete(partition);
        if (problem.reason === 'FINISHED') unfinished.delete(partition);
        else startLater(partition);
      }
      if (!unfinished.size) call.end();
    },
  };

  return new Promise((resolve, reject) => {
    call.on('data', (message) => {
      heard();
      take[message.message]?.(message[message.message]);
    });
    call.on('error', () => {});  // Its status tells the same.
    call.on('status', (status) => {
      clearTimeout(silence);
      if (status.code === grpc.status.OK) resolve(!unfinished.size);
      else reject(status);
    });
    heard();
    const {bucket, credit, heartbeat} = options;
    send({open: {
      bucket, bucketVersion: state.bucketVersion, plainRows: true, creditBytes: credit, heartbeatSeconds: Number(heartbeat),
    }});
  });
}

async function main() {
  const state = new State(options.state);
  const client = new ChangeStreamService(options.target, grpc.credentials.createInsecure(), {
    'grpc.max_receive_message_length': MESSAGE_BYTES,
  });
  const stop = () => {
    state.save();
    process.exit(0);
  };
  process.on('SIGINT', stop).on('SIGTERM', stop);
  setInterval(() => state.save(), SAVE_MS).unref();
  for (let done = false; !done;) {
    try {
      await hello(client, state);
      done = await follow(client, state);
    } catch ({code, details}) {
      say(`follow: ${grpc.status[code]}: ${details}`);
      if ([grpc.status.INVALID_ARGUMENT, grpc.status.NOT_FOUND].includes(code)) process.exit(1);
    }
    // Not all clients at the same moment.
    if (!done) await pause(PAUSE_MS * (1 + Math.random()));
  }
  state.save();
  client.close();
}

await main();
