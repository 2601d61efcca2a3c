"""The systems that kafkalog is measured beside: how each is had, started, loaded and stopped, on this machine alone.

| module | what it starts | from |
|---|---|---|
| `kafka` | Apache Kafka's brokers, and its own ProducerPerformance and ConsumerPerformance | jars |
| `rabbitmq` | a RabbitMQ node | the Debian package `rabbitmq-server` |
| `activemq` | an ActiveMQ broker over KahaDB | jars |

`jars` gets jars by their Maven coordinates, and `processes` has what all of them share. A peer that cannot be had on a
machine raises `NotAvailable` with the reason; the benchmark then names it as missing.
"""
