-- One POST, sent over and over. The request is static, so wrk builds it once and the script costs nothing
-- while it runs. With BENCH_EXPECT set every answer is read and compared, which costs time: that form is
-- the warm-up, never the measurement.

wrk.method = "POST"
wrk.body = os.getenv("BENCH_BODY")
for line in os.getenv("BENCH_HEADERS"):gmatch("[^\n]+") do
  local name, value = line:match("^([^:]+): (.*)$")
  wrk.headers[name] = value
end

local threads = {}

function setup(thread)
  thread:set("wrong", 0)
  thread:set("first_wrong", "")
  table.insert(threads, thread)
end

local expected = os.getenv("BENCH_EXPECT")
if expected then
  function response(status, _, body)
    if status ~= 200 or not body:find(expected, 1, true) then
      if wrong == 0 then
        first_wrong = status .. " " .. body
      end
      wrong = wrong + 1
    end
  end
end

function done(summary, latency)
  local wrong_answers = 0
  for _, thread in ipairs(threads) do
    wrong_answers = wrong_answers + thread:get("wrong")
    if thread:get("wrong") > 0 then
      io.write("WRONG " .. thread:get("first_wrong"):gsub("%s+", " ") .. "\n")
    end
  end
  local errors = summary.errors
  io.write(string.format(
    'BENCH {"requests":%d,"microseconds":%d,"p50":%d,"p99":%d,"not_2xx":%d,"broken":%d,"wrong":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout, wrong_answers))
end
